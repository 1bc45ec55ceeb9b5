"""Money from PayPal, by two rails: docs/paypal.md says what to read first. gateway.py is their contract."""
