"""Options of other systems: names, defaults, and what each is here."""
