"""Runs the loopback PayPal in the foreground."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from aiohttp import web

from ledger.paypal.stub.app import make_app


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ledger.paypal.stub", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--state", type=Path, help="folder that keeps orders over a restart")
    parser.add_argument("--webhook-url", default="", help="where events go, such as .../v1/webhooks/paypal")
    parser.add_argument("--webhook-id", default="STUB-WEBHOOK", help="the merchant's PAYPAL_WEBHOOK_ID")
    parser.add_argument("--ipn-url", default="", help="where notifications go, such as .../v1/paypal/ipn")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app = make_app(
        state=given.state, webhook_url=given.webhook_url, webhook_id=given.webhook_id, ipn_url=given.ipn_url
    )
    web.run_app(app, host=given.host, port=given.port, print=None, shutdown_timeout=2)


if __name__ == "__main__":
    main()
