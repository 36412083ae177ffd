"""TEMPORARY stand-in for fedobp.sweep_folder.resume_sweep."""
from dataclasses import dataclass
from pathlib import Path
import time
from fedobp.saved_runs import SavedRun, read_run
from fedobp.sweeps import sweep
@dataclass(frozen=True)
class Outcome:
    runs: dict; failed: dict; missing: list
def resume_sweep(folder, runs, *, minutes=None, most=None, progress=None):
    begun=time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    todo={n:c for n,c in runs.items() if not (folder/n/"result.json").exists()}
    failed={}
    names=list(todo)
    if names and not (minutes is not None and minutes<=0):
        res=sweep([todo[n] for n in names], out=[folder/n for n in names], keep_models=False, failures="return")
        for n,r in zip(names,res):
            if hasattr(r,"error"): failed[n]=r.error
    done={n:read_run(folder/n) for n in runs if (folder/n/"result.json").exists()}
    return Outcome(done, failed, [n for n in runs if n not in done and n not in failed])
