"""The validation runbook as a command: phases, acceptance criteria, a report with a verdict."""
