"""The portal, /portal/."""

from django.urls import path

from apex.portal.views import budgets, home, keys, low_balance, projects, purchases

app_name = "portal"
urlpatterns = [
    path("", home.home, name="home"),
    path("usage/", home.usage, name="usage"),
    path("statement/", home.statement, name="statement"),
    path("statement/<str:month>.<statement_format:extension>", home.statement_file, name="statement-file"),
    path("switch/", home.switch, name="switch"),
    path("keys/", keys.keys, name="keys"),
    path("keys/<uuid:key_id>/revoke/", keys.revoke, name="revoke-key"),
    path("keys/<uuid:key_id>/limits/", budgets.key_limits, name="key-limits"),
    path("projects/", projects.projects, name="projects"),
    path("projects/<uuid:project_id>/", projects.project, name="project"),
    path("projects/<uuid:project_id>/archive/", projects.archive, name="archive-project"),
    path("budgets/", budgets.budgets, name="budgets"),
    path("budgets/<int:budget_id>/remove/", budgets.remove, name="remove-budget"),
    path("credits/", purchases.buy, name="credits"),
    path("credits/low/", low_balance.low_balance, name="low-balance"),
    path("credits/return/", purchases.paid, name="credits-return"),
    path("credits/cancel/", purchases.cancelled, name="credits-cancel"),
    path("credits/<uuid:top_up_id>/", purchases.progress, name="top-up"),
]
