"""
Options for a script: dataclass defaults <- config files <- --key=value.

    python train.py config/82M.py config/small.py --max_iters=500 --value_residual=True

A script declares its options as a dataclass, one per line with a trailing comment, and calls
configure(Config, argv). A config file is plain Python that assigns to those names. Files stack from
left to right and --key=value wins over all files, except over what a run of a list sets for itself;
of a repeated key the last counts. Every value, from a file or the command line, passes the same typed
gate (convert).

Bad input raises UserError; command(main) turns it into one line on stderr and exit code 2.
"""
import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import math
import os
import sys
import tokenize
import types
import typing

REPO = os.path.dirname(os.path.abspath(__file__))
NANOGPT = {"gradient_accumulation_steps": "tokens_per_iter", "lr": "learning_rate"}  # names that users bring: ours


class Picked(dict):
    """A dict from a config file, of which the command line picked some keys: --runs=a,b. All stay in the dict."""
    picked = ()


class UserError(Exception):
    """Bad input. The message is one line: what was found, what was expected, what to do."""


def command(main):
    """Run a script's main(); a UserError or an operating-system error ends it with one line and exit code 2; Ctrl-C: 130."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a console that lacks a character shows another instead
    try:
        main()
    except UserError as e:
        message = str(e)
    except (MemoryError, RuntimeError) as e:
        if not out_of_memory(e):
            raise
        message = "out of memory: give less at a time, as with a smaller --batch_size, --num_samples or --max_new_tokens"
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `python train.py | head`: the reader left, so there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as e:
        message = f"{e.filename or 'input/output'}: {e.strerror or e}"
    else:
        return
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    sys.exit(2)


def out_of_memory(e):
    """Whether an exception is Python's, numpy's or torch's for this; on a CPU torch raises a plain RuntimeError."""
    return type(e).__name__ in ("MemoryError", "OutOfMemoryError") or "out of memory" in str(e) or "allocate memory" in str(e)


def convert(value, hint, name, typed=False):
    """
    The typed gate: value as type hint. typed: it is text from the command line, where numbers are spelled out.
    int widens to float; bool takes true/false/1/0 in any case; None only where the hint has it;
    a Literal takes the listed words. Nothing else changes type. Raises UserError.
    """
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    text = value.strip() if isinstance(value, str) else None
    for kind in kinds:
        if kind is type(None) and (value is None or typed and text == "None"):
            return None
        if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind):
            return value
        if kind is bool:
            flag = {"true": True, "1": True, "false": False, "0": False}.get((text or repr(value)).lower())
            if flag is not None:
                return flag
        if kind in (int, float) and not isinstance(value, bool) and typed == (text is not None):
            with contextlib.suppress(ValueError, OverflowError):
                number = kind(text) if typed else value
                if isinstance(number, (int, kind)) and math.isfinite(number):
                    return kind(number)
        if kind in (str, dict) and isinstance(value, kind):
            return value
    expected = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            expected += [str(word) for word in typing.get_args(kind)]
        else:
            expected.append({bool: "true or false", int: "a whole number", float: "a number", str: "text",
                             dict: "a dict", type(None): "None"}[kind])
    raise UserError(f"{name}: found {value!r}, expected {' or '.join(expected)}")


def override(config, values, where, typed=False):
    """
    A copy of config with values (name -> value), each known by name and passed through the gate; where names their origin
    in error messages. An option that is a dict in a file takes names of its keys on the command line (Picked).
    """
    hints, new = typing.get_type_hints(type(config)), {}
    for name, value in values.items():
        if name not in hints:
            close = [NANOGPT[name]] if NANOGPT.get(name) in hints else difflib.get_close_matches(name, hints, n=1)
            hint = f"did you mean {close[0]}?" if close else "--help lists all options" + (
                "" if typed else "; a name of a file's own begins with _")
            raise UserError(f"{where}: unknown option {name!r}; {hint}")
        if hints[name] is dict and typed:
            have, names = Picked(getattr(config, name)), [word.strip() for word in value.split(",") if word.strip()]
            for word in names:
                if word not in have:
                    raise UserError(f"{where}: {name} has no {word!r}; a config file given before defines: "
                                    f"{', '.join(have) or 'none'}")
            value, have.picked = have, names
        new[name] = convert(value, hints[name], f"{where}: {name}", typed)
    return dataclasses.replace(config, **new)


def read_file(path, known=()):
    """
    The assignments of a config file, name -> value. Imports, functions and _names are the file's own business, unless
    they have the name of an option.
    """
    if not path.endswith(".py"):
        raise UserError(f"argument {path!r}: expected a config file, whose name ends in .py, or an option, written "
                        + (f"--{path}" if "=" in path else "--name=value"))
    found = next((p for p in (path, os.path.join(REPO, path)) if os.path.isfile(p)), None)
    if found is None:
        raise UserError(f"config file {path!r} not found here or in {REPO}")
    space = {"__file__": os.path.abspath(found), "__name__": "config"}
    try:
        with open(found, encoding="utf-8-sig") as f:
            tree = ast.parse(f.read(), found)
        exec(compile(tree, found, "exec"), space)
    except (Exception, SystemExit) as e:
        line = e.lineno if isinstance(e, SyntaxError) else next(
            (f.lineno for f in reversed(inspect.getinnerframes(e.__traceback__, 0)) if f.filename == found), 0)
        raise UserError(f"{found}{f', line {line}' * bool(line)}: {type(e).__name__}: {e}") from None
    imported = {name.asname or name.name for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))
                for name in node.names}
    return {k: v for k, v in space.items()
            if k in known or not (k.startswith("_") or callable(v) or isinstance(v, types.ModuleType) or k in imported)}


def configure(Config, argv):
    """
    An instance of the dataclass Config from argv (without the script's name).
    Raises UserError for an unknown name, a value of the wrong type, a missing or broken file, or an argument of
    another form. --help prints every option and leaves with exit code 0.
    """
    if any(arg in ("--help", "-h") for arg in argv):
        print((inspect.getdoc(sys.modules[Config.__module__]) or "") + "\n\nOptions, as --name=default:\n")
        print(describe(Config))
        sys.exit(0)
    config, options = Config(), {}
    for arg in argv:
        if not arg.startswith("-"):
            config = override(config, read_file(arg, typing.get_type_hints(Config)), f"config file {arg}")
            continue
        name, equals, value = arg.removeprefix("--").partition("=")
        if not (arg.startswith("--") and equals and name == name.strip()):
            raise UserError(f"argument {arg!r}: an option is written --name=value, with two dashes and no spaces, "
                            f"as in --{name.strip().lstrip('-') or 'name'}={value.strip() or 'value'}")
        options[name] = value
    return override(config, options, "command line", typed=True)


def describe(Config):
    """One line per option: --name=default, its trailing comment and the words it takes, in the order of definition."""
    comments = {}
    for cls in reversed(Config.__mro__[:-1]):
        name = None
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
            if token.type == tokenize.NAME and token.start[1] == 4:
                name = token.string
            elif token.type == tokenize.COMMENT and name and token.start[1] > 4:
                comments[name] = token.string.strip("# ")
    lines, hints = [], typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        words = typing.get_args(hints[f.name]) if typing.get_origin(hints[f.name]) is typing.Literal else ()
        choices = f" ({' | '.join(words)})" if words else ""
        lines.append(f"  --{f.name}={default}".ljust(36) + " " + comments.get(f.name, "") + choices)
    return "\n".join(lines)


def at_least(config, low, *names, below=None):
    """Raise UserError unless low <= each named option (and < below, if given)."""
    for name in names:
        value = getattr(config, name)
        if not low <= value or below is not None and value >= below:
            bound = f"at least {low}" + (f" and below {below}" if below is not None else "")
            raise UserError(f"--{name}={value}: expected {bound}")
