"""Settings of every Apex process, all from the environment. INTERFACES: docs/configuration.md."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from decimal import Decimal

from celery.schedules import crontab

from apex.env import Env, fail
from apex.local.paths import BASE_DIR, var_dir
from apex.local.state import StateFolder

VERSION = "0.1.0"
VAR_DIR = var_dir()
# True on the embedded defaults: loopback only, plain HTTP, no server named by anybody.
DEBUG_LOCAL = not os.environ.get("DATABASE_URL", "").strip()
# Where a stack runs on this checkout, every command finds it at the ports it chose.
_env = Env(fallback=StateFolder(VAR_DIR).running_addresses() if DEBUG_LOCAL else {})
if DEBUG_LOCAL:
    try:
        VAR_DIR.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail([f"APEX_VAR_DIR cannot be used: {VAR_DIR}: {error.strerror}"])


def _secret_key() -> str:
    """SECRET_KEY from the environment, else one made once per checkout and kept under var/."""
    if given := os.environ.get("SECRET_KEY", "").strip():
        if len(given) < 32:
            _env.problems.append("SECRET_KEY must have at least 32 characters")
        return given
    if not DEBUG_LOCAL:
        _env.problems.append("SECRET_KEY is not set (it is needed as soon as DATABASE_URL names a server)")
        return "x" * 50
    path = VAR_DIR / "secret_key"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text()
    value = secrets.token_urlsafe(50)
    with os.fdopen(handle, "w") as file:
        file.write(value)
    return value


DEBUG = False
SECRET_KEY = _secret_key()
ALLOWED_HOSTS = _env.items("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]" if DEBUG_LOCAL else "")
if not ALLOWED_HOSTS:
    _env.problems.append("ALLOWED_HOSTS is not set")

WEB_PORT = _env.integer("APEX_WEB_PORT", 8000, low=1, high=65535)
GATEWAY_PORT = _env.integer("APEX_GATEWAY_PORT", 8080, low=1, high=65535)
GATEWAY_HOST = _env.text("APEX_GATEWAY_HOST", "127.0.0.1")
GATEWAY_ANSWERS_PER_SLOT = _env.integer("APEX_GATEWAY_ANSWERS_PER_SLOT", 2, low=1, high=1000)
GATEWAY_DRAIN_S = _env.integer("APEX_GATEWAY_DRAIN_S", 30, low=0, high=86400)
# Third parties are reached at public addresses, and at private ones that are listed here.
UPSTREAM_PRIVATE_NETWORKS = _env.networks("APEX_UPSTREAM_PRIVATE_NETWORKS", "")
# Where steered ports may be opened; every gateway listens on those that are.
STEERED_PORTS = _env.ports("APEX_STEERED_PORTS", "21000-21999")
STEER_ENGINE = _env.choice("APEX_ENGINE", "auto", ["auto", "kernel", "relay"])
STEER_KERNEL_FLOWS = _env.integer("APEX_KERNEL_FLOWS", 1024, low=1, high=65536)
# Per node-hour, before anything was seen of a zone; and the work that an eviction costs.
EVICTIONS_PER_HOUR_PRIOR = _env.integer("APEX_EVICTIONS_PER_1000_HOURS", 50, low=0, high=100_000) / 1000
EVICTION_LOST_MINUTES = _env.integer("APEX_EVICTION_LOST_MINUTES", 3, low=0, high=600)
NODE_NAME = _env.text("APEX_NODE_NAME", "")
PUBLIC_URL = _env.url("APEX_PUBLIC_URL", f"http://127.0.0.1:{WEB_PORT}", ["http", "https"]).rstrip("/")
GATEWAY_PUBLIC_URL = _env.url(
    "APEX_GATEWAY_PUBLIC_URL", f"http://127.0.0.1:{GATEWAY_PORT}", ["http", "https"]
).rstrip("/")

# --- what the rooms plug into each other ---------------------------------------------------------
# The gateway of kernel_steer asks this class who may call, where to send and what it costs.
STEER_ADMISSION = "brokerage.admission.BrokerageAdmission"
# Signals "this node goes away" are signed with a key of their own, so that a leak of one is not a
# leak of the other.
STEER_SIGNAL_KEY = os.environ.get("STEER_SIGNAL_KEY", "").encode() or hmac.digest(
    SECRET_KEY.encode(), b"apex steer signal key v1", hashlib.sha256
)
# Where nodes send them as datagrams: the gateway tells them through Redis what it got.
STEER_SIGNAL_HOST = _env.text("APEX_SIGNAL_HOST", GATEWAY_HOST)
STEER_SIGNAL_PORT = _env.integer("APEX_SIGNAL_PORT", 0, low=0, high=65535)
# Called in the gateway with what it did not believe.
STEER_REFUSED_SIGNALS = "brokerage.eviction.report_refused_signals"
IMDS_AWS_URL = _env.url("IMDS_AWS_URL", "http://169.254.169.254", ["http"]).rstrip("/")
IMDS_GCP_URL = _env.url("IMDS_GCP_URL", "http://metadata.google.internal", ["http"]).rstrip("/")
IMDS_AZURE_URL = _env.url("IMDS_AZURE_URL", "http://169.254.169.254", ["http"]).rstrip("/")
IMDS_ALIBABA_URL = _env.url("IMDS_ALIBABA_URL", "http://100.100.100.200", ["http"]).rstrip("/")
IMDS_TENCENT_URL = _env.url("IMDS_TENCENT_URL", "http://metadata.tencentyun.com", ["http"]).rstrip("/")

# A real deployment has to say it: nobody should sell for a stand-in's money because of a default.
PAYPAL_MODE = _env.choice("PAYPAL_MODE", "stub" if DEBUG_LOCAL else "", ["stub", "sandbox", "live"])
PAYPAL_STUB_URL = _env.url("PAYPAL_STUB_URL", "http://127.0.0.1:8099", ["http"]).rstrip("/")
_paypal_default = None if PAYPAL_MODE in {"sandbox", "live"} else "stub"
PAYPAL_CLIENT_ID = _env.text("PAYPAL_CLIENT_ID", _paypal_default)
PAYPAL_CLIENT_SECRET = _env.text("PAYPAL_CLIENT_SECRET", _paypal_default)
_paypal_stub = PAYPAL_MODE == "stub"
PAYPAL_WEBHOOK_ID = _env.text("PAYPAL_WEBHOOK_ID", "STUB-WEBHOOK" if _paypal_stub else "")
PAYPAL_RECEIVER = _env.text("PAYPAL_RECEIVER", "merchant@stub.invalid" if _paypal_stub else "")
# Which rail new purchases take; what either tells is booked whatever this says.
PAYPAL_RAIL = _env.choice("PAYPAL_RAIL", "orders", ["orders", "ipn"])
# The authority that the stand-in's certificates come from; the stand-in writes it into its folder.
PAYPAL_STUB_CA = _env.text("PAYPAL_STUB_CA", str(VAR_DIR / "paypal-stub" / "ca.pem"))

# What any two of the staff may move by hand in one proposal, in the units of its currency.
LEDGER_PROPOSAL_LIMIT = _env.amount("APEX_PROPOSAL_LIMIT", Decimal(1000))

# --- servers ----------------------------------------------------------------------------------------
if DEBUG_LOCAL:
    from apex.local.postgres import APP_ROLE, OWNER_ROLE, EmbeddedPostgres

    DATABASE_URL = EmbeddedPostgres.default().url(APP_ROLE)
    DIRECT_URL = EmbeddedPostgres.default().url(OWNER_ROLE)
else:
    DATABASE_URL = _env.url("DATABASE_URL", None, ["postgres", "postgresql"])
    DIRECT_URL = _env.url("DIRECT_URL", "", ["postgres", "postgresql"]) or DATABASE_URL
if not os.environ.get("REDIS_URL", "").strip():
    from apex.local.valkey import EmbeddedValkey

    REDIS_URL = EmbeddedValkey.default().url
else:
    REDIS_URL = _env.url("REDIS_URL", None, ["redis", "rediss", "unix"])


def _database(variable: str, url: str) -> dict[str, object]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        parts = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        _env.problems.append(f"{variable} is not a valid PostgreSQL URL")
        parts = {}
    options = {k: v for k, v in parts.items() if k not in {"dbname", "user", "password", "host", "port"}}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.get("dbname", ""),
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": str(parts.get("port", "")),
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
        # Poolers in transaction mode know no server-side cursors.
        "DISABLE_SERVER_SIDE_CURSORS": True,
        "OPTIONS": options,
    }


_app_database = _database("DATABASE_URL", DATABASE_URL)
_owner_database = _app_database if DIRECT_URL == DATABASE_URL else _database("DIRECT_URL", DIRECT_URL)
DATABASES = {"default": _owner_database if os.environ.get("APEX_DB_ROLE") == "owner" else _app_database}
# The role that the running product uses; migrations grant it no more than it needs.
DB_APP_ROLE = str(_app_database["USER"])

CACHES = {"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": REDIS_URL}}

# --- Django -----------------------------------------------------------------------------------------
INSTALLED_APPS = [
    "apex",
    "brokerage",
    "ledger",
    "kernel_steer",
    "ledger.paypal.ipn.apps.DjangoPayPalIpn",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.postgres",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "djmoney",
    "django_htmx",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "csp",
]
MIDDLEWARE = [
    "apex.middleware.ProbeMiddleware",
    "apex.middleware.RequestIdMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "apex.middleware.PrivatePagesMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]
ROOT_URLCONF = "apex.urls"
WSGI_APPLICATION = "apex.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "apex.portal.scope.portal_context",
            ],
        },
    },
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AUTH_USER_MODEL = "auth.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False
STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATIC_ROOT = BASE_DIR / "staticfiles"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
}
LOGIN_URL = "sign-in"
LOGIN_REDIRECT_URL = "portal:home"
LOGOUT_REDIRECT_URL = "landing"

# --- browser and transport security -----------------------------------------------------------------
_https = PUBLIC_URL.startswith("https://")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _https
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SECURE_SSL_REDIRECT = _https
SECURE_HSTS_SECONDS = 31_536_000 if _https else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = _https
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _https else None
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CSRF_TRUSTED_ORIGINS = [PUBLIC_URL]
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 1_048_576
# How many proxies of ours stand in front and add to X-Forwarded-For; 0: clients speak to us.
TRUSTED_PROXIES = _env.integer("APEX_TRUSTED_PROXIES", 0, low=0, high=5)
# A scraper that is not on this machine shows it as its bearer token; empty: nobody else may scrape.
METRICS_TOKEN = _env.text("APEX_METRICS_TOKEN", "")

# --- API --------------------------------------------------------------------------------------------
REST_FRAMEWORK = {
    "EXCEPTION_HANDLER": "apex.api.problems.handle_exception",
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Apex API",
    "DESCRIPTION": "LLM inference on spot GPUs that survives evictions.",
    "VERSION": VERSION,
    "OAS_VERSION": "3.1.1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "apex.api.schema.add_problems",
    ],
    "ENUM_NAME_OVERRIDES": {"HealthStatus": ["pass", "warn", "fail"]},
}

# --- Celery -----------------------------------------------------------------------------------------
CELERY_BROKER_URL = REDIS_URL.replace("unix://", "redis+socket://", 1)
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_TIME_LIMIT = 60
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT = 5
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # A task whose worker died comes back after this; tasks are short, so it may be short too.
    "visibility_timeout": 120,
    # The default sweep runs once in about 100 s, which is an outage for a money task.
    "unacked_restore_throttle": 1,
    # Without these a publisher waits for ever on a silently broken connection.
    "socket_timeout": 10,
    "socket_keepalive": not REDIS_URL.startswith("unix://"),
    "health_check_interval": 10,
}
CELERY_TIMEZONE = "UTC"
# Every task here is a sweep: it looks in the database for what is to be done. The tasks that are sent
# when something happens are hints that make it happen sooner; losing one loses nothing.
CELERY_BEAT_SCHEDULE = {
    name.rpartition(".")[2]: {"task": name, "schedule": seconds, "options": {"expires": 10 * seconds}}
    for name, seconds in {
        "brokerage.tasks.charge_usage": 1.0,
        "brokerage.tasks.sweep_nodes": 5.0,
        "brokerage.tasks.forget_kept_answers": 60.0,
        "brokerage.tasks.watch_wallets": 60.0,
        "ledger.tasks.sweep_top_ups": 5.0,
        "ledger.tasks.sweep_events": 5.0,
        "ledger.tasks.sweep_refunds": 15.0,
        "ledger.tasks.expire_holds": 15.0,
        "ledger.tasks.expire_grants": 60.0,
        "ledger.tasks.recognise_promotions": 3600.0,
        "ledger.tasks.advance_totals": 300.0,
        "ledger.tasks.post_usage": 5.0,
        "ledger.tasks.seal_audit_events": 5.0,
        "apex.tasks.forget_old_requests": 3600.0,
    }.items()
}
CELERY_BEAT_SCHEDULE["reconcile_paypal"] = {
    "task": "ledger.tasks.reconcile_paypal",
    "schedule": crontab(hour="6", minute="0"),
    "options": {"expires": 6 * 3600},
}
CELERY_BEAT_SCHEDULE["verify_books"] = {
    "task": "ledger.tasks.verify_books",
    "schedule": crontab(hour="2", minute="30"),
    "options": {"expires": 6 * 3600},
}

EMAIL_BACKEND = _env.text("EMAIL_BACKEND", "django.core.mail.backends.filebased.EmailBackend")
EMAIL_FILE_PATH = VAR_DIR / "mail"
DEFAULT_FROM_EMAIL = _env.text("DEFAULT_FROM_EMAIL", "Apex <no-reply@localhost>")

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {
        "handlers": ["console"],
        "level": _env.choice("LOG_LEVEL", "INFO", ["DEBUG", "INFO", "WARNING", "ERROR"]),
    },
    "loggers": {
        "httpx": {"level": "WARNING"},
        "httpx2": {"level": "WARNING"},
        "asyncio": {"level": "WARNING"},
    },
}

if _env.problems:
    fail(_env.problems)
