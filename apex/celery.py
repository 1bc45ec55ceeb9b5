"""The Celery application: `celery -A apex worker`."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apex.settings")

app = Celery("apex")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
