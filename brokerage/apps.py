from django.apps import AppConfig


class BrokerageConfig(AppConfig):
    name = "brokerage"

    def ready(self) -> None:
        from brokerage.verify import register_checks

        register_checks()
