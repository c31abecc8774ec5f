"""The help: the list of commands, and all about one of them or about an error word. Pure."""

from vmgahp.commands.console import commands
from vmgahp.commands.console.render import BAD, GOOD, NOTE, PLAIN, Line, clean
from vmgahp.protocol import error_words

LEGEND = (
    "A line that begins in upper case goes to the server as it is. # and a number is a request; VM is the number of "
    "a VM, which may be left out while there is only one."
)


def overview() -> list[Line]:
    """The list of commands."""
    width = max(len(f"{own.word} {own.arguments}") for own in commands.OWN) + 2
    lines = [Line(GOOD, "Commands of the console")]
    for own in commands.OWN:
        form = f"{own.word} {own.arguments}".rstrip()
        lines.append(Line(PLAIN, f"  {form.ljust(width)}{own.summary}"))
    lines.append(Line(GOOD, "Commands of the protocol"))
    for command in commands.PROTOCOL:
        form = f"{command.word} {command.arguments}".rstrip()
        lines.append(Line(PLAIN, f"  {form.ljust(width)}{command.summary}"))
    return [*lines, Line(NOTE, LEGEND)]


def about(topic: str) -> list[Line]:
    """All about a command, of the console's or of the protocol's, or about an error word."""
    lines: list[Line] = []
    own = commands.own(topic.lower()) if not topic.isupper() else None
    if own is not None:
        lines += [
            Line(GOOD, f"{own.word} {own.arguments}".rstrip()),
            Line(PLAIN, f"  {_sentence(own.summary)}"),
        ]
        if own.text:
            lines.append(Line(PLAIN, f"  {own.text}"))
        if own.protocol:
            lines.append(Line(PLAIN, f"  It sends {own.protocol}."))
        topic = own.protocol or topic
    command = commands.protocol(topic)
    if command is not None:
        lines += _protocol(command)
    if not lines:
        lines = _word(topic)
    return lines


def _protocol(command: commands.Command) -> list[Line]:
    lines = [Line(GOOD, f"{command.word} {command.arguments}".rstrip())]
    lines.append(Line(PLAIN, f"  {_sentence(command.summary)}"))
    if command.text:
        lines.append(Line(PLAIN, f"  {command.text}"))
    if command.short:
        lines.append(Line(PLAIN, f"  Here for short: {command.short}"))
    if command.result:
        lines.append(Line(PLAIN, f"  The result is such as: {command.result}"))
    if command.errors:
        lines.append(Line(PLAIN, "  or REQUEST 1 and one of"))
        lines += [Line(PLAIN, f"    {word}: {error_words.meaning(word)}") for word in command.errors]
    return lines


def _word(topic: str) -> list[Line]:
    meaning = error_words.meaning(topic)
    if meaning:
        word = topic if topic == error_words.NOTHING else f"VMGAHP_ERR_{error_words.short(topic)}"
        return [Line(GOOD, word), Line(PLAIN, f"  {meaning}"), Line(PLAIN, f"  {error_words.fate(topic)}")]
    near = nearest(topic)
    return [Line(BAD, f"There is no help about {clean(topic)}." + (f" Did you mean {near}?" if near else ""))]


def nearest(word: str) -> str:
    """A command or an error word that looks like `word`; empty where none does."""
    import difflib

    known = [own.word for own in commands.OWN]
    known += [command.word for command in commands.PROTOCOL]
    known += error_words.WORDS
    pool = {name.lower(): name for name in known}
    short = word.lower().removeprefix("vmgahp_err_")
    found = difflib.get_close_matches(short[:60], pool, 1, 0.6)
    return pool[found[0]] if found else ""


def _sentence(summary: str) -> str:
    return summary[:1].upper() + summary[1:] + "."
