"""django-paypal's application with the keys its migrations were written for: else Django wants to write new ones."""

from __future__ import annotations

from django.apps import AppConfig


class DjangoPayPalIpn(AppConfig):
    name = "paypal.standard.ipn"
    label = "ipn"
    default_auto_field = "django.db.models.AutoField"
    verbose_name = "PayPal notifications"
