"""A PayPal on this machine, for tests and the demo: Orders v2 with its error shapes, and faults on demand.

    python -m ledger.paypal.stub --port 8099 --state var/paypal-stub

`store` keeps the orders, `api` answers the merchant, `pages` asks the payer, `faults` breaks things and
`webhooks` tells the merchant. It needs no Django, and nothing of it is used outside PAYPAL_MODE=stub.
"""
