"""Hand-made tidy rows, as result files hold them."""

from fedobp.paper.experiment import Setting

Q = {"cifar10": 0.99998, "mnist": 0.9998, "fmnist": 0.99993}


def row(method="fedobp", seed=42, pooled=80.0, **more):
    """A row of a full-length run in the paper's setting."""
    dataset = more.get("dataset", "cifar10")
    options = f"q={Q.get(dataset, 0.999)};score=squared;norm=none;scope=all;ema=0.0;start=global"
    common = {
        "run": f"{dataset}-{method}-{more.get('mode')}-{seed}-{more.get('options')}", "method": method, "mode": None,
        "dataset": dataset, "alpha": 0.1, "seed": seed, "protocol": "paper", "model": "served", "rounds": 400,
        "pooled": pooled, "client_mean": pooled - 1, "majority_class": 60.0, "personal_mean": 18.0,
        "personal_share": 2e-5, "bytes_down": 4000, "bytes_up": 4000, "visit_passes": 5.0, "use_passes": 0.0,
        "options": options if method in ("fedobp", "decoupled") else "", "participation": 0.1,
    }  # fmt: skip
    return {**common, **more}


def setting(**more):
    """A setting at full scale: CIFAR10, Dirichlet(0.1), one seed."""
    common = {
        "scale": "full", "datasets": ("cifar10",), "alphas": (0.1,), "seeds": (42,), "rounds": 400, "mode": "both",
        "grid": (0.0, 0.9, 0.999, 1.0),
    }  # fmt: skip
    return Setting(**{**common, **more})


def swept(q, pooled, **more):
    """A row of a sweep over quantiles, with the product score unless another is given."""
    options = {
        "score": "squared",
        "norm": "none",
        "scope": "all",
        "ema": "0.0",
        "start": "global",
        **more.pop("set", {}),
    }
    text = ";".join(f"{name}={value}" for name, value in {"q": q, **options}.items())
    return row(pooled=pooled, options=text, **more)
