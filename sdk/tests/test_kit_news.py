"""News: nobody who takes `next` before looking misses what is told after the look."""

import asyncio

from quartet.kit.news import News


async def test_what_was_told_before_wakes_nobody_who_waits_now() -> None:
    news = News()
    news.tell()
    waiting = asyncio.create_task(news.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    news.tell()
    await asyncio.wait_for(waiting, 30)


async def test_what_is_told_between_the_look_and_the_wait_is_not_missed() -> None:
    news = News()
    before_looking = news.next
    news.tell()
    await asyncio.wait_for(before_looking.wait(), 30)


async def test_everybody_who_waits_is_woken() -> None:
    news = News()
    waiting = [asyncio.create_task(news.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    news.tell()
    await asyncio.wait_for(asyncio.gather(*waiting), 30)
