"""What the application role may do with the ledger's tables. Everything else goes through functions."""

# Table -> privileges. A table that is not named here is an ordinary one of another room.
TABLE_PRIVILEGES: dict[str, str] = {}
