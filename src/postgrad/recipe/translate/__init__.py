"""Command lines and configs of other systems as recipes.

    shell.py, reader.py     a script, flags or a config file -> options by name
    options.py, draft.py    which options are not used yet; the recipe that they become
    rules.py                name of an option -> what it is here, one line each
    common.py               what the three systems have in common: batches, schedules, adapters
    openrlhf.py, open_instruct.py, trl.py    the tables of each
    writer.py               the recipe as TOML, with comments
    command.py              all of it, for `postgrad translate`

Scripts are read, never run.
"""
