#!/bin/sh
# First start of the database container: the product's role owns nothing; migrations run as the owner.
set -eu
psql --set ON_ERROR_STOP=1 --set password="$APEX_APP_PASSWORD" --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
CREATE ROLE apex_app LOGIN PASSWORD :'password';
SQL
