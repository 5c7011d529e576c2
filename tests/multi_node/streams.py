"""Runs streams at the same time: streams.py URL COUNT TOKENS. Prints `begun` once all have tokens, then a line for each: the longest time between two
events in milliseconds, and its text as JSON."""

import json
import sys
import threading
import time
import urllib.request

url, count, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
begun = [threading.Event() for _ in range(count)]
results = [None] * count


def run(index):
    body = {"model": "ensemble", "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    text, longest, before = "", 0.0, None
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            longest = max(longest, now - (before or now))
            before = now
            event = json.loads(line[6:])
            if "error" in event:
                text += f" error: {event['error']}"
                break
            text += "".join(choice["text"] for choice in event["choices"])
            begun[index].set()
    results[index] = f"{round(longest * 1000)} {json.dumps(text)}"


threads = [threading.Thread(target=run, args=[index]) for index in range(count)]
for thread in threads:
    thread.start()
for event in begun:
    event.wait(60)
print("begun", flush=True)
for thread in threads:
    thread.join()
print(*results, sep="\n")
