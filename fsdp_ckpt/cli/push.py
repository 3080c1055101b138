"""``fsdp-ckpt push``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard

EXAMPLES = """\b
Examples:
  fsdp-ckpt push out/ hf://me/my-model
  fsdp-ckpt push run/checkpoint-2000 hf://me/my-run/step-2000 --dry-run
  fsdp-ckpt push run/checkpoint-2000 hf://me/my-model --part model
  fsdp-ckpt push out/ hf://org/model --create-pr --message "Longer training"
\b
Login: hf auth login, or HF_TOKEN. An interrupted push sends, when it is
  started again, only what is not there yet.
"""


@guard
def push(
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: a file, a part, or a folder with parts.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="hf://[datasets/]OWNER/REPO[@BRANCH][/PATH]")],
    part: Annotated[
        list[str] | None, typer.Option(help="Only this part: model, optimizer, or a name; repeatable.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody see a repository that is made. [default: private]")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; made where there is none.")] = None,
    path_in_repo: Annotated[str | None, typer.Option(help="Folder in the repository, as in the URL.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    message: Annotated[str | None, typer.Option("-m", "--message", help="Of the commit.")] = None,
    no_card: Annotated[
        bool, typer.Option("--no-card", help="Write no README.md where the repository has none.")
    ] = False,
    no_validate: Annotated[bool, typer.Option("--no-validate", help="Push it even if it has faults.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Remove another checkpoint's weights in the same folder, in one commit.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the commit's address only.")] = False,
) -> None:
    """Bring a checkpoint to the Hugging Face hub.

    Validates SRC, sends only the files that make it up, and shows them in one commit: readers see all of it or nothing.
    """
    from fsdp_ckpt.cli.push_view import show_push
    from fsdp_ckpt.ops.push import PushOptions
    from fsdp_ckpt.ops.push import push as run

    options = PushOptions(
        parts=part or (),
        public=public,
        revision=revision,
        path_in_repo=path_in_repo,
        create_pr=create_pr,
        message=message,
        card=not no_card,
        validate=not no_validate,
        replace=replace,
        dry_run=dry_run,
    )
    with out.progress("push", quiet=quiet or dry_run) as listener:
        report = run(src, url, options=options, listener=listener)
    show_push(report, as_json=as_json, quiet=quiet)
