"""What tests of `vmgahp run` have in common."""

AWKWARD = [
    *("a b", "$(x)", "$$(y)", "$$", "$$$(", "'", '"', "\\", '\\"', "a\nb\n\n", "\n", "é", "\u200b", "\udcff\udc80", ""),
    *("~", "$HOME", "`id`", "*", "--", "-x", "%s %d", "A=1", "!", "a\tb", "$ENV(HOME)", "$[1]", "\\n", "#x", "\\\\"),
    *(
        'it\'s "q" \\" $$(z)\n\'', "$(Process)", "$(DOLLAR)(x)", "$$([1])", " lead", "trail ", "\r", "\x1b[0m",
        "ü\n$$(q",
    ),
]  # fmt: skip
"""Arguments that some language on the way could take for its own."""
