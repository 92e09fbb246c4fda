"""lm-eval's own command with our models registered first, since it loads no plugins.

python -m gdn2.hf.lm_eval run --model hf --model_args pretrained=FOLDER --tasks lambada_openai
"""

from importlib import import_module

import gdn2.hf  # noqa: F401


def main() -> None:
    """Run the command line of lm-eval."""
    try:
        command = import_module("lm_eval.__main__")
    except ImportError as reason:
        raise SystemExit(f'gdn2.hf.lm_eval: {reason}; pip install "gdn2[eval]"') from None
    command.cli_evaluate()


if __name__ == "__main__":
    main()
