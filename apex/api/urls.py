"""REST, /v1/. Addresses have no slash at the end."""

from django.urls import path
from drf_spectacular.renderers import OpenApiJsonRenderer2
from drf_spectacular.views import SpectacularAPIView

from apex.api.views import budgets, catalogue, keys, low_balance, money, projects, public, statements, usage

urlpatterns = [
    path("models", catalogue.Models.as_view(), name="api-models"),
    path("evictions", catalogue.Evictions.as_view(), name="api-evictions"),
    path("usage", usage.Usage.as_view(), name="api-usage"),
    path("balance", money.Balance.as_view(), name="api-balance"),
    path("entries", money.Entries.as_view(), name="api-entries"),
    path("holds", money.Holds.as_view(), name="api-holds"),
    path("low-balance", low_balance.LowBalance.as_view(), name="api-low-balance"),
    path("statements", statements.Statements.as_view(), name="api-statements"),
    path(
        "statements/<str:month>.<statement_format:extension>",
        statements.StatementFile.as_view(),
        name="api-statement-file",
    ),
    path("statements/<str:month>", statements.OneStatement.as_view(), name="api-statement"),
    path("topups", money.TopUps.as_view(), name="api-topups"),
    path("topups/<uuid:top_up_id>", money.OneTopUp.as_view(), name="api-topup"),
    path("api-keys", keys.APIKeys.as_view(), name="api-keys"),
    path("api-keys/<uuid:key_id>", keys.OneAPIKey.as_view(), name="api-key"),
    path("projects", projects.Projects.as_view(), name="api-projects"),
    path("projects/<uuid:project_id>", projects.OneProject.as_view(), name="api-project"),
    path("pilot-applications", public.PilotApplications.as_view(), name="api-pilot-applications"),
    path("platform/health-matrix", public.HealthMatrix.as_view(), name="health-matrix"),
    path("budgets", budgets.Budgets.as_view(), name="api-budgets"),
    path("budgets/<int:budget_id>", budgets.OneBudget.as_view(), name="api-budget"),
    path(
        "openapi.json",
        SpectacularAPIView.as_view(
            authentication_classes=[], permission_classes=[], renderer_classes=[OpenApiJsonRenderer2]
        ),
        name="openapi",
    ),
    path("docs", public.api_docs, name="api-docs"),
]
