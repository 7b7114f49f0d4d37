"""The base class of all errors that a user can fix."""


class UserError(ValueError):
    """An error that the user can fix.

    The message names the value, the rule and the remedy.

    Scripts print the message without a traceback and exit with code 2, so that
    launchers do not start them again. All other errors, including every OSError and
    ValueError of a library, end with a traceback and code 1.
    """
