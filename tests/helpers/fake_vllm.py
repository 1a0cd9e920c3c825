"""A Python that speaks like a process with vLLM and has none: what it does is in its name.
"fails_at_wake_kv_cache" fails at the first message of that name, and so on. "waits" answers no
prompt before a cut, and then with its first two tokens; "waits_diverged" the same, the second with
a logprob that is not finite. "routes" gives the experts of two layers, two a token, numbered
through; "routes_less" those of a token too few.

It answers a prompt with its own tokens and the seed's last digit, each with logprob -0.5. Its
weights are a number: the version that it was sent last, added to every logprob that it scores.
"""

import sys
from pathlib import Path

SPEAKS = """\
import base64, json, os, sys, time
behaviour = os.path.basename(__file__)
if "-c" in sys.argv:
    sys.exit(behaviour == "without_vllm")
answers = os.fdopen(os.dup(1), "wb", buffering=0)
os.dup2(2, 1)
def tell(message):
    answers.write(json.dumps(message).encode() + b"\\n")
start = json.loads(sys.stdin.readline())
print("starts", start["model"], file=sys.stderr, flush=True)
if behaviour == "dies_at_start":
    raise SystemExit("no room for weights")
if behaviour == "refuses":
    tell({"failed": "ValueError: head size 16 is not known"})
    raise SystemExit(1)
if behaviour == "worker_fails":
    for line in ("Traceback:", "AssertionError: no such shape", "RuntimeError: then this"):
        print("(Worker_TP1 pid=7) ERROR 01-02 03:04:05 [executor.py:9]", line, file=sys.stderr)
    print("a long traceback\\n" * 200, file=sys.stderr, flush=True)
    tell({"failed": "Exception: see above"})
    raise SystemExit(1)
if behaviour == "never_ready":
    time.sleep(60)
if behaviour == "computes_long":
    began = time.process_time()
    while time.process_time() - began < 1.0:
        pass
tell({"ready": {"vllm": "0.0", "cache_tokens": 1}})
asleep = set()
held = []
weights, stale = 0, behaviour == "stale" or (behaviour == "second_stale" and "1" in sys.argv)
for line in sys.stdin:
    message = json.loads(line)
    print(json.dumps(message), file=sys.stderr, flush=True)
    if message["do"] == "sample" and behaviour.startswith("waits"):
        held.append(message)
        continue
    if message["do"] == "cut":
        second = float("nan") if behaviour == "waits_diverged" else -0.5
        value = [dict(key=key, tokens=one["prompt"][:2], logprobs=[-0.5, second], stopped=False,
                      versions=[[weights, 2]]) for one in held for key in one["keys"]]
        held.clear()
        tell({"done": message["call"], "value": value})
        continue
    if message["do"] == "sample":
        if behaviour == "dies_at_work":
            raise SystemExit("killed by a bad kernel")
        for key, seed in zip(message["keys"], message["seeds"]):
            tokens = [*message["prompt"], seed % 10]
            logprobs = [-0.5 if behaviour != "diverged" else float("nan")] * len(tokens)
            routed = {}
            if behaviour.startswith("routes"):
                computed = len(message["prompt"]) + len(tokens) - 1 - (behaviour == "routes_less")
                numbers = b"".join(i.to_bytes(2, "little") for i in range(computed * 4))
                routed = {"experts": base64.b64encode(numbers).decode()}
            tell(dict(key=key, tokens=tokens, logprobs=logprobs, stopped=True,
                      versions=[[weights, len(tokens)]], **routed))
        continue
    value = None
    if behaviour == "_".join(["fails_at", message["do"], *filter(None, [message.get("part")])]):
        tell({"failed": "RuntimeError: CUDA error: out of memory"})
        raise SystemExit(1)
    if message["do"] == "places":
        boot = open("/proc/sys/kernel/random/boot_id").read().strip()
        here = boot + " " + os.readlink("/proc/self/ns/pid")
        value = [dict(machine=here, card=None, torch_version="0", nccl=None, shares=False)]
    if message["do"] == "sleep":
        asleep = {"weights", "kv_cache"}
        value = behaviour != "stays_awake"
    if message["do"] == "wake":
        asleep.discard(message["part"])
        value = bool(asleep) or behaviour == "stays_asleep"
    if message["do"] == "score":
        value = [[0.0] + [-1.0 - weights] * (len(one) - 1) for one in message["sequences"]]
    if message["do"] == "load_adapter" and not stale:
        weights = message["version"]
    if message["do"] == "start_weights":
        arrived = []
    if message["do"] == "load_weights":
        arrived.append(message["parcel"])
        if behaviour == "loses_a_parcel":
            arrived.pop()
    if message["do"] == "finish_weights" and len(arrived) != message["manifest"]["parcels"]:
        tell({"failed": "RunError: weights: %d parcels arrived" % len(arrived)})
        raise SystemExit(1)
    if message["do"] == "finish_weights" and not stale:
        weights = message["version"]
    tell({"done": message["call"], "value": value})
"""


def fake_vllm(folder: Path, behaviour: str = "well") -> str:
    """An interpreter that behaves so."""
    path = folder / behaviour
    path.write_text(f"#!{sys.executable}\n{SPEAKS}", "utf-8")
    path.chmod(0o755)
    return str(path)
