"""
Rebuild docs/walk.md: run its commands in order, and put the table that each printed into the block below it.

    python -m analysis.walk

Finished runs are left alone, so later times take half as long as the first, about ten minutes on two CPU cores. Pictures and
JSON files go where the commands say: docs/walk/.
"""
import os
import re
import shlex
import subprocess
import sys

from configurator import REPO, UserError, command

WALK = os.path.join(REPO, "docs", "walk.md")
# a command, and the table below it if there is one
STEP = re.compile(r"```bash\n(python .*)\n```\n(?:\n```\n(?:.*\n)*?```\n)?")


def steps(text):
    """The walk's commands, as lists of words without the leading python."""
    return [shlex.split(match[1])[1:] for match in STEP.finditer(text)]


def table(output):
    """The last table that a script printed before it said what it wrote."""
    return output.split("\n\nwrote")[0].split("\n\n")[-1].strip("\n")


def rebuild(text, run):
    """text with the table of run(words) below each of its commands."""
    return STEP.sub(lambda m: f"```bash\n{m[1]}\n```\n\n```\n{table(run(shlex.split(m[1])[1:]))}\n```\n", text)


def run(words):
    print("python " + " ".join(words), flush=True)
    done = subprocess.run([sys.executable, *words], cwd=REPO, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"python {' '.join(words)}: ended with exit code {done.returncode}; its message above says why")
    return done.stdout


def main():
    if len(sys.argv) > 1:
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("--help", "-h") else 2)
    with open(WALK, encoding="utf-8") as f:
        text = f.read()
    text = rebuild(text, run)
    with open(WALK + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(WALK + ".tmp", WALK)
    print(f"wrote {WALK}")


if __name__ == "__main__":
    command(main)
