"""The portal, /portal/."""

from django.urls import path

from apex.portal.views import home, keys

app_name = "portal"
urlpatterns = [
    path("", home.home, name="home"),
    path("usage/", home.usage, name="usage"),
    path("switch/", home.switch, name="switch"),
    path("keys/", keys.keys, name="keys"),
    path("keys/<uuid:key_id>/revoke/", keys.revoke, name="revoke-key"),
]
