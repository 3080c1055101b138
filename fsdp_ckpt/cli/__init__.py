"""The command line: one file per command, which parses, makes one call into ``ops`` and hands the report to ``out``."""
