import asyncio, json, time
import aiohttp, pytest
from redis.asyncio import Redis
from collections.abc import AsyncIterator
from eventually import eventually
from integration.gateway_fixtures import Stack, running_stack, reverse_or_vector
from integration.jobs_bench import JobBench, running_jobs
from integration.ledger_fixtures import database_url, db, postgres_server
__all__ = ["database_url", "db", "postgres_server"]

@pytest.fixture
async def stack(client: Redis, redis_url: str):
    async with running_stack(client, redis_url) as running:
        yield running

async def comp(stack, prompts, headers={}, tier="free", **more):
    body={"model":"tiny","prompt":prompts, **more}
    async with stack.http.post(stack.url+"/v1/completions", json=body, headers={**stack.key(tier), **headers}) as a:
        return a.status, await a.json(), {k.lower():v for k,v in a.headers.items()}

async def leases(client, who="customer-free"):
    return await client.zcard(f"rl:leases:{who}")

async def test_partial(stack, client):
    k={"Idempotency-Key":"abc"}
    s,d,h=await comp(stack, ["a","b","c"], k); assert s==200
    keys=[x async for x in client.scan_iter("idem:*")]
    print(len(keys))
    await client.delete(keys[0])
    n=len(stack.worker.seen)
    s,d2,h=await comp(stack, ["a","b","c"], k)
    print(s,h.get("idempotent-replayed"), len(stack.worker.seen)-n, [c["text"] for c in d2["choices"]], d["id"],d2["id"])
    keys=[x async for x in client.scan_iter("idem:*")]
    await client.delete(*keys[:2])
    stack.catalog.set(key={"burst":1.0,"requests_per_second":0.0001})
    b=await client.hget("rl:customer:customer-free","tokens")
    s,d3,h=await comp(stack, ["a","b","c"], k)
    print(s,d3); 
    stack.catalog.set(key={"burst":8.0,"requests_per_second":0.0001})
    s,d3,h=await comp(stack, ["a","b","c"], k)
    print(s,d3.get("error"),h["x-ratelimit-remaining-requests"]);
    s,d3,h=await comp(stack, ["a","b","c","d"], k)
    print("longer list same key",s,d3.get("error"))
    s,d3,h=await comp(stack, ["a","b","X"], k)
    print("other member",s,d3.get("error"))
    print("leases", await leases(client), len(stack.gateway._parts.waiters) if hasattr(stack.gateway,'_parts') else '')

async def test_leaver(stack, client):
    stack.worker.hold=True
    async def one(n, delay):
        t=asyncio.create_task(comp(stack,["x%d"%i for i in range(n)]))
        await asyncio.sleep(delay); t.cancel()
        await asyncio.gather(t, return_exceptions=True)
    await asyncio.gather(*(one(200, d/1000) for d in (1,2,3,4,6,8,12,20)))
    async def clean(): return await leases(client)==0 and await client.llen("queue:free")==0
    await asyncio.sleep(0.5)
    print("leases", await leases(client), "queue", await client.llen("queue:free"))
    await eventually(clean,"clean",5)
    s,d,h=await comp(stack,["a"]*5+["b"], {"Idempotency-Key":"q"}) if False else (0,0,0)

async def test_race(stack, client):
    k={"Idempotency-Key":"abc"}
    rs=await asyncio.gather(*(comp(stack,["a","b","c"],k) for _ in range(6)))
    print([ (s,d.get("error",{}).get("code")) for s,d,h in rs])
    print(len(stack.worker.seen), await leases(client))

async def test_odd(stack, client):
    for more in ({"max_tokens":2**62},{"max_tokens":-1},{"max_tokens":0},{"temperature":1e308},{"seed":2**63-1},{"seed":-2**63},{"n":2},{"best_of":1},{"logit_bias":{"1":5}},{"user":"x"*10000}):
        s,d,h=await comp(stack,["a","b"],**more); print(more if len(str(more))<60 else "..",s,d.get("error",{}).get("message"))
    for p in ([], [""], ["a",""], ["\x00"], ["a"]*257, ["a"]*256, [["a"]], [1,2], ["\ud800"], "a"*200000):
        try: s,d,h=await comp(stack,p); print(str(p)[:30],s,d.get("error",{}).get("message"))
        except Exception as e: print(str(p)[:30],"EXC",type(e),e)
    for raw in (b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', b'{"model":"tiny","messages":[{"role":"user","content":[]}]}', b'{"model":"tiny","messages":[]}', json.dumps({"model":"tiny","messages":[{"role":"user","content":"x"*200}]*1024}).encode(), json.dumps({"model":"tiny","messages":[{"role":"user","content":"x"}]*1025}).encode(), json.dumps({"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":""}]*5000}]}).encode(), b'{"model":"tiny","messages":[{"role":"user","content":null}]}',b'{"model":"tiny","service_tier":"flex","messages":[{"role":"user","content":"x","name":"\\u0000"}],"stream":false,"metadata":{"a":"b"}}'):
        async with stack.http.post(stack.url+"/v1/chat/completions",data=raw,headers={**stack.key(),"Content-Type":"application/json"}) as a:
            print(raw[:60],len(raw),a.status,(await a.json()).get("error",{}).get("message"))
    for st in ("FLEX","",5,None,"flex ","priority","scale","default"):
        s,d,h=await comp(stack,"a",service_tier=st); print("tier",st,s,d.get("error",{}).get("message"))

async def test_delete_storm(client, redis_url, database_url, db):
    async with running_jobs(client, redis_url, database_url, db) as b:
        b.stack.worker.hold=True
        tid=await b.accepted({"input":"x"})
        t0=time.perf_counter()
        tasks=[asyncio.create_task(b.call("DELETE",tid)) for _ in range(90)]
        await asyncio.sleep(0.01)
        tid2=await b.accepted({"input":"y"}); t1=time.perf_counter()-t0
        r=await asyncio.gather(*tasks); print("insert behind deletes",round(t1,3),"all",round(time.perf_counter()-t0,3),{x[1].get("status") for x in r})
        print((await b.call("DELETE",tid2,"paid"))[:2], (await b.get(tid2,"paid"))[:2], (await b.get("req_"+"0"*32))[:2],(await b.get("req_%00"))[0], (await b.get("../../internal/health"))[0])
        # key races with jobs
        b.stack.worker.hold=False
        rs=await asyncio.gather(*(b.submit({"input":"z"},**{"Idempotency-Key":"kk"}) for _ in range(8)))
        print([(s,d.get("task_id",d.get("error",{}).get("code"))) for s,d,h in rs])
        await asyncio.sleep(.3)
        s,d,h=await b.submit({"input":"z"},**{"Idempotency-Key":"kk"}); print(s,d,h.get("idempotent-replayed"))
        s,d,h=await b.stack.infer({"input":"z"},**{"Idempotency-Key":"kk"}); print("waited",s,d.get("request_id"))
        print(await client.zcard("rl:leases:"+__import__("integration.jobs_bench",fromlist=["x"]).customer_id("free")))
        for raw in (b'{"input":"a","callback_url":null}', b'{"input":"a","parameters":{"a":1e999}}', b'{"input":"a","\\u0063allback_url":"http://x/"}', b'{"input":"a","callback_url":"http://x/","callback_url":null}', b'{"input":"a\\u0000b"}', b'{"input":"a\\ud800","x":1}', b'{"input":"a","service_tier":"flex","parameters":{"big":123456789012345678901234567890}}',b'{"input":"a","service_tier":"flex","\\u0070arameters":{"big":123456789012345678901234567890}}'):
            s,d,h=await b.submit(raw); print(raw,s,d.get("error",{}).get("message"))
        for p in ("respond-async, respond-async","respond-async=1","wait=5,respond-async;foo",'x="a,respond-async"',"RESPOND-ASYNC"):
            s,d,h=await b.stack.infer({"input":"q"},**{"Prefer":p}); print(p,s)
