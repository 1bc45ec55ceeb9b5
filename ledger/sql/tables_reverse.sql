ALTER TABLE settlement DROP CONSTRAINT settlement_account_currency;
ALTER TABLE ledger_hold DROP CONSTRAINT hold_account_currency;
ALTER TABLE ledger_entries DROP CONSTRAINT entry_journal_currency, DROP CONSTRAINT entry_account_currency;
ALTER TABLE ledger_balance RESET (fillfactor);
