-- What Django's models cannot say: one currency per account and journal, by composite foreign keys.
ALTER TABLE ledger_entries
    ADD CONSTRAINT entry_journal_currency FOREIGN KEY (journal_id, amount_currency)
        REFERENCES ledger_journal (id, currency),
    ADD CONSTRAINT entry_account_currency FOREIGN KEY (account_id, amount_currency)
        REFERENCES ledger_account (id, currency);
ALTER TABLE ledger_hold
    ADD CONSTRAINT hold_account_currency FOREIGN KEY (account_id, amount_currency)
        REFERENCES ledger_account (id, currency);
ALTER TABLE settlement
    ADD CONSTRAINT settlement_account_currency FOREIGN KEY (account_id, currency)
        REFERENCES ledger_account (id, currency);

-- Room on the page keeps balance updates off the indexes.
ALTER TABLE ledger_balance SET (fillfactor = 60);
