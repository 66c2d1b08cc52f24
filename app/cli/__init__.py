"""The command line. Commands that talk to a server take LORAMUX_URL and LORAMUX_API_KEY; operator
commands work on the database that the settings name."""

import typer

from app.cli import (
    adapters,
    aliases,
    audit,
    bench,
    chat,
    config,
    demo,
    engines,
    health,
    keys,
    limit_requests,
    quantize,
    secrets,
    serve,
    tenants,
    usage,
    users,
    webhooks,
)
from app.cli.database import migrate

app = typer.Typer(
    name="loramux",
    help="Thousands of LoRA adapters on one quantized base model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
serve.register(app)
app.command()(migrate)
app.add_typer(tenants.app, name="tenants")
app.add_typer(users.app, name="users")
app.add_typer(keys.app, name="keys")
app.add_typer(limit_requests.app, name="limit-requests")
app.add_typer(adapters.app, name="adapters")
app.add_typer(aliases.app, name="aliases")
app.add_typer(webhooks.app, name="webhooks")
app.add_typer(engines.app, name="engines")
app.add_typer(secrets.app, name="secrets")
app.add_typer(config.app, name="config")
app.command()(chat.chat)
app.command()(usage.usage)
app.command()(audit.audit)
app.command()(demo.demo)
app.command()(bench.bench)
app.command()(quantize.quantize)
app.command()(health.health)


def main() -> None:
    """The entry point of the `loramux` script."""
    app()
