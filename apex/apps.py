from django.apps import AppConfig
from django.db.models.signals import post_migrate


class ApexConfig(AppConfig):
    name = "apex"

    def ready(self) -> None:
        from apex.grants import grant_app_role

        # Sent once for each app; the last one sees every table.
        post_migrate.connect(grant_app_role, dispatch_uid="grant_app_role")
