"""Corrections of the books by hand: one person proposes, another one approves."""
