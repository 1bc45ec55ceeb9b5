# Everything a newcomer needs; each target sets up what it uses. Targets are described in README.md.
PYTHON := .venv/bin/python
# What a real deployment sets, so that Django's own deployment checks mean something.
PRODUCTION_LIKE := DATABASE_URL=postgresql://apex@db.example.com/apex REDIS_URL=rediss://kv.example.com \
	SECRET_KEY=$$($(PYTHON) -c 'import secrets; print(secrets.token_urlsafe(50))') \
	ALLOWED_HOSTS=apex.example.com APEX_PUBLIC_URL=https://apex.example.com PAYPAL_MODE=stub

.PHONY: demo up test test-vllm lint bench clean

demo:
	@bin/setup runtime demo
	@$(PYTHON) manage.py demo $(if $(filter-out 0,$(ONCE)),--once)

up:
	@bin/setup runtime demo
	@$(PYTHON) manage.py up

test:
	@bin/setup runtime dev demo browser hledger
	@bin/test

test-vllm:
	@bin/setup runtime dev vllm
	@APEX_VLLM_PYTHON="$$(test -e .venv-vllm/apex-stamp && echo "$(CURDIR)/.venv-vllm/bin/python")" \
		$(PYTHON) -m pytest tests/vllm -v -rs --durations=5

lint:
	@bin/setup runtime dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PYTHON) manage.py check --fail-level WARNING
	$(PYTHON) manage.py makemigrations --check --dry-run
	$(PRODUCTION_LIKE) $(PYTHON) manage.py check --deploy --fail-level WARNING

bench:
	@bin/setup runtime dev litellm
	@set -e; for script in bench/*.py; do $(PYTHON) "$$script"; done

# Leaves var/ alone: it holds the databases.
clean:
	rm -rf .venv .venv-vllm .venv-litellm staticfiles .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
