"""Signing in and out, and passwords: Django's views with limits and our pages."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth import views as auth
from django.contrib.auth.forms import AuthenticationForm
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import reverse_lazy

from apex.api.rate_limit import Limit, client_ip, take
from apex.portal.forms import SignInForm

# Two buckets: one stops guessing at an account from many addresses, one an address trying many accounts.
_PER_ACCOUNT = Limit("sign-in-account", requests=10, window_s=300)
_PER_ADDRESS = Limit("sign-in-address", requests=30, window_s=300)
_FORGOT = Limit("forgot-password", requests=5, window_s=3600)


class SignIn(auth.LoginView):
    template_name = "account/sign_in.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        account = request.POST.get("username", "").strip().lower()[:150]
        for limit, who in ((_PER_ADDRESS, client_ip(request)), (_PER_ACCOUNT, account)):
            decision = take(limit, who)
            if not decision.allowed:
                # An empty form: the password is not tried, and who asks learns nothing about it.
                context = self.get_context_data(form=SignInForm(request), wait_s=decision.retry_after_s)
                headers = {"Retry-After": str(decision.retry_after_s)}
                return self.render_to_response(context, status=429, headers=headers)
        return super().post(request, *args, **kwargs)

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        response = super().form_invalid(form)
        response.status_code = 422
        return response


class ForgotPassword(auth.PasswordResetView):
    template_name = "account/form.html"
    email_template_name = "account/forgot_email.txt"
    subject_template_name = "account/forgot_subject.txt"
    success_url = reverse_lazy("forgot-password-sent")
    extra_context = {
        "heading": "Set a new password",
        "intro": "Give us the e-mail address of your account and we send you a link.",
        "action": "Send me the link",
    }

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if request.method == "POST" and not take(_FORGOT, client_ip(request)).allowed:
            # The same page as always: what we did is nobody's business but the address's owner's.
            return auth.PasswordResetDoneView.as_view(template_name="account/forgot_sent.html")(request)
        return super().dispatch(request, *args, **kwargs)


class SetPassword(auth.PasswordResetConfirmView):
    """The link of an invitation or of a forgotten password. Signs the person in."""

    template_name = "account/form.html"
    success_url = reverse_lazy("portal:home")
    post_reset_login = True
    extra_context = {"heading": "Set your password", "action": "Set password and sign in"}


class ChangePassword(auth.PasswordChangeView):
    template_name = "account/form.html"
    success_url = reverse_lazy("portal:home")
    extra_context = {"heading": "Change your password", "action": "Change password"}

    def form_valid(self, form: Any) -> HttpResponse:
        messages.success(self.request, "Your password is changed. Other devices have been signed out.")
        return super().form_valid(form)
