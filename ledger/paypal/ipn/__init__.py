"""The rail `ipn`: PayPal's older payment buttons, and the notifications that PayPal sends for every payment.

django-paypal gives the table of what came (`paypal_ipn`) and its form; nothing of ours hangs on its signals.
`inbox` takes a notification in, `message` reads it, `postback` asks PayPal whether it is PayPal's, `rail` is
the payment gateway over those that are. Why so: docs/decisions/0015-ipn-as-second-rail.md.
"""
