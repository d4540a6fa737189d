"""The table of symptoms names every hypothesis, and only hypotheses."""

import re
from pathlib import Path

from reconcile.diagnosis.names import known_names

PAGE = Path(__file__).parents[2] / "docs" / "symptoms.md"


def test_the_table_and_the_hypotheses_have_the_same_names():
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| .*`\w+` \|$", line)]
    listed = [re.search(r"`(\w+)` \|$", line).group(1) for line in lines]

    assert sorted(listed) == sorted(known_names())
