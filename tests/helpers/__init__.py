"""What the tests share. Programs that tests start (`ranks.py`, `killed.py`, `hostile.py` …) lie beside the tests."""
