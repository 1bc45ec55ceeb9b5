"""The business rules of the gateway. `broker` reads top to bottom; the rest are its parts.

Everything here runs inside the gateway's event loop, with plain SQL over its own connection pool:
Django's ORM would block the loop.
"""

from brokerage.admission.broker import BrokerageAdmission

__all__ = ["BrokerageAdmission"]
