"""How command lines are read: names are never guessed, and wrong usage is told in one sentence."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes options by their whole names only, and negative numbers in any notation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        # argparse's own knows no exponents, so that -1e30 would be an option that does not exist.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|-inf$")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # `allow_abbrev` is about names with two dashes: -t would still be -ts. -n5 stays: the value stands behind -n.
        return [found for found in super()._get_option_tuples(option_string) if found[1] == option_string[:2]]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}; see {self.prog} --help\n")
