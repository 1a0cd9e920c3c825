"""Readers, chat templates, loss masks, tickets."""
