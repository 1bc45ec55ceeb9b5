"""The forms of the public pages and of the portal. Django writes each error beside its field."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.models import User
from django.core.validators import DecimalValidator
from django.http import QueryDict

from apex.portal.purchases import TOP_UP_MAX, TOP_UP_MIN
from brokerage.models import APIKey, Budget, Customer, LowBalanceRule, PilotApplication, Project
from brokerage.services.limits import FIELDS


class PilotApplicationForm(forms.ModelForm):
    # A field that people do not see; programs that fill in everything give themselves away.
    website = forms.CharField(
        required=False, widget=forms.TextInput(attrs={"tabindex": "-1", "autocomplete": "off"})
    )

    class Meta:
        model = PilotApplication
        fields = ["name", "email", "company", "use_case"]
        labels = {
            "name": "Your name",
            "email": "E-mail",
            "company": "Company or team",
            "use_case": "What will you run?",
        }
        widgets = {
            "name": forms.TextInput(attrs={"autocomplete": "name"}),
            "email": forms.EmailInput(attrs={"autocomplete": "email"}),
            "company": forms.TextInput(attrs={"autocomplete": "organization"}),
            "use_case": forms.Textarea(attrs={"rows": 4}),
        }

    @property
    def is_from_a_program(self) -> bool:
        return bool(self.data.get("website"))


class SignInForm(AuthenticationForm):
    """Takes the user name or the e-mail address."""

    error_messages = {
        # The same for an unknown account, a wrong password and a locked account.
        "invalid_login": "That user name or e-mail and password do not fit together. Mind capitals, or set a new password.",
        "inactive": "That user name or e-mail and password do not fit together. Mind capitals, or set a new password.",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["username"].label = "E-mail or user name"

    def clean_username(self) -> str:
        given: str = self.cleaned_data["username"]
        if "@" not in given or User.objects.filter(username=given).exists():
            return given
        # An address shared by several accounts names none of them.
        names = list(
            User.objects.filter(email__iexact=given, is_active=True).values_list("username", flat=True)[:2]
        )
        return names[0] if len(names) == 1 else given


class SwitchCustomerForm(forms.Form):
    customer = forms.UUIDField()


class NewKeyForm(forms.Form):
    project = forms.ModelChoiceField(
        Project.objects.none(),
        empty_label=None,
        help_text="A key stays in its project. Usage and budgets follow it.",
    )
    name = forms.CharField(max_length=100, help_text="Where it will be used, such as “staging server”.")
    mode = forms.ChoiceField(
        choices=[("live", "Live"), ("test", "Test")],
        label="Kind",
        help_text="Both work the same way and are charged; the name tells you which one leaked.",
    )

    def __init__(self, customer: Customer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        project = self.fields["project"]
        assert isinstance(project, forms.ModelChoiceField)
        project.queryset = customer.projects.filter(archived_at__isnull=True)
        if project.queryset.count() == 1:  # nothing to choose
            project.required, project.widget = False, forms.HiddenInput()


class ProjectForm(forms.Form):
    name = forms.CharField(max_length=100, help_text="What it is for, such as “support bot”.")


class KeyLimitsForm(forms.ModelForm):
    class Meta:
        model = APIKey
        fields = list(FIELDS)
        labels = {
            "requests_per_minute": "Requests a minute",
            "tokens_per_minute": "Tokens a minute",
            "concurrent_answers": "Answers at a time",
        }
        help_texts = {
            "requests_per_minute": "Empty: no limit.",
            "tokens_per_minute": "Prompt and answer together. Empty: no limit.",
            "concurrent_answers": "Empty: no limit.",
        }


class BudgetForm(forms.Form):
    """Sets the amount of a budget, whether there is one already or not."""

    scope = forms.ChoiceField(label="For")
    period = forms.ChoiceField(choices=Budget.Period.choices, label="Every")
    amount = forms.DecimalField(
        min_value=0,
        max_digits=24,
        decimal_places=9,
        widget=forms.NumberInput(attrs={"inputmode": "decimal", "step": "any"}),
    )

    def __init__(self, customer: Customer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        active = customer.projects.filter(archived_at__isnull=True)
        self._projects = {f"project:{one.pk}": one for one in active}
        keys = customer.api_keys.filter(revoked_at__isnull=True).order_by("name")
        self._keys = {f"key:{one.pk}": one for one in keys}
        self.fields["scope"].choices = [  # type: ignore[attr-defined]
            ("all", "All keys together"),
            ("Projects", [(value, one.name) for value, one in self._projects.items()]),
            ("Keys", [(value, f"{one.name} ({one})") for value, one in self._keys.items()]),
        ]
        self.fields["period"].choices = [("daily", "Day"), ("monthly", "Month")]  # type: ignore[attr-defined]
        self.fields["amount"].label = f"Amount in {customer.currency}"
        self.fields[
            "amount"
        ].help_text = f"At most this much is spent from midnight to midnight, or in a calendar month, {customer.time_zone}."

    @property
    def project(self) -> Project | None:
        """Of a valid form, as `key`. Both None: for all keys together."""
        return self._projects.get(self.cleaned_data["scope"])

    @property
    def key(self) -> APIKey | None:
        return self._keys.get(self.cleaned_data["scope"])


class BuyCreditForm(forms.Form):
    """`token` makes sending the form twice one purchase."""

    amount = forms.DecimalField(
        label="Amount in USD",
        min_value=TOP_UP_MIN,
        max_value=TOP_UP_MAX,
        max_digits=6,
        decimal_places=2,
        help_text=f"Between {TOP_UP_MIN} and {TOP_UP_MAX} USD.",
        widget=forms.NumberInput(attrs={"inputmode": "decimal", "step": "0.01"}),
    )
    token = forms.UUIDField(widget=forms.HiddenInput)


class LowBalanceForm(forms.Form):
    """Amounts in the customer's currency; empty is off."""

    notice_below = forms.DecimalField(
        label="Tell owners when less is available than",
        help_text="One mail each time that your credits fall below it. Empty: no mail.",
    )
    top_up_below = forms.DecimalField(
        label="Prepare a purchase when less is available than",
        help_text="This and the next two go together. Empty: nothing is prepared.",
    )
    top_up_amount = forms.DecimalField(
        label="Amount of a purchase",
        min_value=TOP_UP_MIN,
        max_value=TOP_UP_MAX,
        help_text=f"Between {TOP_UP_MIN} and {TOP_UP_MAX}.",
    )
    monthly_cap = forms.DecimalField(label="At most in a calendar month")

    def __init__(
        self, customer: Customer, rule: LowBalanceRule | None, data: QueryDict | None = None
    ) -> None:
        initial = {name: f"{value:.2f}" for name in self.base_fields if (value := getattr(rule, name, None))}
        super().__init__(data, initial=initial)
        for field in self.fields.values():
            assert isinstance(field, forms.DecimalField)
            field.required = False
            field.label = f"{field.label} ({customer.currency})"
            field.validators.append(DecimalValidator(max_digits=14, decimal_places=2))
            field.widget.attrs |= {"inputmode": "decimal", "step": "0.01"}
        self.fields[
            "monthly_cap"
        ].help_text = f"Counts what was paid of such purchases since the first, {customer.time_zone}."
