"""`python -m apex.local.metadata_service`"""

from __future__ import annotations

import argparse
import sys

from aiohttp import web

from apex.local.metadata_service.service import MetadataService


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m apex.local.metadata_service")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    try:
        web.run_app(
            MetadataService().application(),
            host=arguments.host,
            port=arguments.port,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1,
            print=lambda *_: None,
        )
    except OSError as error:
        sys.exit(f"apex: cannot listen on {arguments.host}:{arguments.port}: {error.strerror}")


if __name__ == "__main__":
    main()
