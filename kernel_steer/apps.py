from django.apps import AppConfig


class KernelSteerConfig(AppConfig):
    name = "kernel_steer"
