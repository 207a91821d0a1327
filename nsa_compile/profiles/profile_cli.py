"""`nsa-compile profile`."""

from __future__ import annotations

import click

from nsa_compile.cli import SuggestingGroup
from nsa_compile.profiles.pass_profile_cli import passes


@click.group(cls=SuggestingGroup)
def profile() -> None:
    """Show what the compiler's passes are worth.

    \b
    nsa-compile profile passes --out profile
    """


profile.add_command(passes)
