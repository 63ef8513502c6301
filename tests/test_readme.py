"""What README.md says of layouts, the certificate and other trainers is so."""

import contextlib
import io
import re
from pathlib import Path

from test_docs import load_script

from trainkit.tools.testing import run_ranks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SENTENCES = " ".join(README.split())
LAYOUTS = ["Layout()", "Layout(ring=2)", 'Layout(ring=2, fold_sp="none")']


def run_scripts(scripts):
    """Run scripts on a rank; return what they print."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for script in scripts:
            exec(script, {"__name__": "page"})
    return printed.getvalue()


def test_its_script_prints_the_same_on_two_ranks_in_three_layouts():
    assert "`, `".join(LAYOUTS[:2]) + f"` and `{LAYOUTS[2]}`" in SENTENCES
    code, output = re.search(
        r"^```python\n(import attrs\n.*?)^```\n\n```text\n(.*?)^```",
        README,
        re.MULTILINE | re.DOTALL,
    ).groups()
    assert code.count("tk.Layout()") == 1
    scripts = [code.replace("tk.Layout()", f"tk.{layout}") for layout in LAYOUTS]
    assert run_ranks(run_scripts, 2, scripts, timeout=240) == [output * len(LAYOUTS), ""]


def test_what_it_says_of_the_certificate_is_so():
    script = load_script(ROOT / "docs" / "pictures" / "certificate.py")
    layouts, mistakes = script.read_numbers()
    assert f"Each of {len(layouts)} tested" in SENTENCES
    assert "differs by less than 1e-14" in SENTENCES
    assert max(max(numbers) for _, _, numbers in layouts) < 1e-14
    assert "on up to 8 processes" in SENTENCES
    assert max(ranks for _, ranks, _ in layouts) == 8
    assert f"one of {len(mistakes)} [planted mistakes]" in SENTENCES
    assert "by 1e-3 or more" in SENTENCES
    assert min(mistakes) >= 1e-3


def test_the_rows_of_its_comparison_stand_on_the_page_that_explains_them():
    page = (ROOT / "docs" / "comparison.md").read_text()
    lines = README.partition("| | trainkit |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(lines) == 8
    assert [line for line in lines if line not in page.splitlines()] == []
    script = load_script(ROOT / "docs" / "pictures" / "certificate.py")
    reported = [script.ONE_GPU, *script.REPORTED.values()]
    least, most = min(row[1] for row in reported), max(row[1] for row in reported)
    assert f"of a new model in {len(reported)} layouts" in SENTENCES
    assert f"reports losses of {least:.2f} to {most:.2f} after ten steps" in SENTENCES
    assert "initial values differ too" in SENTENCES
