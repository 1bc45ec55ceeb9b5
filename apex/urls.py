"""Every address of the web process. /healthz and /readyz are answered by ProbeMiddleware."""

from django.contrib import admin
from django.contrib.auth.views import LogoutView, PasswordResetDoneView
from django.urls import include, path, register_converter

from apex.health.views import status_page, status_strip
from apex.metrics import metrics_page
from apex.portal.statements import StatementFormat
from apex.portal.views import account, public
from ledger.paypal.ipn.inbox import paypal_ipn
from ledger.paypal.views import paypal_webhook

admin.site.site_header = admin.site.site_title = "Apex"
admin.site.index_title = "Back office"

register_converter(StatementFormat, "statement_format")

handler400 = "apex.portal.views.errors.bad_request"
handler403 = "apex.portal.views.errors.permission_denied"
handler404 = "apex.portal.views.errors.not_found"
handler500 = "apex.portal.views.errors.server_error"

urlpatterns = [
    path("favicon.ico", public.favicon),
    path("", public.landing, name="landing"),
    path("apply/thanks/", public.apply_thanks, name="apply-thanks"),
    path("sign-in/", account.SignIn.as_view(), name="sign-in"),
    path("sign-out/", LogoutView.as_view(), name="sign-out"),
    path("password/change/", account.ChangePassword.as_view(), name="change-password"),
    path("password/forgot/", account.ForgotPassword.as_view(), name="forgot-password"),
    path(
        "password/forgot/sent/",
        PasswordResetDoneView.as_view(template_name="account/forgot_sent.html"),
        name="forgot-password-sent",
    ),
    path("password/set/<uidb64>/<token>/", account.SetPassword.as_view(), name="password_reset_confirm"),
    path("portal/", include("apex.portal.urls")),
    path("status/", status_page, name="status"),
    path("status/strip/", status_strip, name="status-strip"),
    path("metrics", metrics_page, name="metrics"),
    path("v1/webhooks/paypal", paypal_webhook, name="paypal-webhook"),
    path("v1/paypal/ipn", paypal_ipn, name="paypal-ipn"),
    path("v1/", include("apex.api.urls")),
    path("admin/", admin.site.urls),
]
