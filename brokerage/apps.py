from django.apps import AppConfig


class BrokerageConfig(AppConfig):
    name = "brokerage"
