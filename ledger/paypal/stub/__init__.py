"""A PayPal on this machine, for tests and the demo: its API with its error shapes, and faults on demand.

    python -m ledger.paypal.stub --port 8099 --state var/paypal-stub

`store` keeps what happened, `api` and `aftersale` answer the merchant, `pages` ask the payer, `webhooks` and
`notifications` tell the merchant, `signing` signs, `faults` breaks things and `control` is for whoever plays
the payer, the bank and the reviewer. It needs no Django, and nothing of it is used outside PAYPAL_MODE=stub.
"""
