"""Buying credit at PayPal: orders.py reads top to bottom, gateway.py is the contract, client.py the API."""
