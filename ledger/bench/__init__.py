"""How fast the books are: real processes as clients, on a database that is thrown away."""

from ledger.bench.database import throw_away_database
from ledger.bench.load import PHASES, Bench, Figures

__all__ = ["PHASES", "Bench", "Figures", "throw_away_database"]
