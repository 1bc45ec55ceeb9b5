#!/usr/bin/env python
"""Command line of Apex. `python manage.py help` lists the commands."""

import os
import sys


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apex.settings")
    from apex.local.ondemand import services_for_command

    with services_for_command(sys.argv):
        from django.core.management import execute_from_command_line

        execute_from_command_line(sys.argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
