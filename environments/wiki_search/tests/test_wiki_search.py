"""The encyclopedia, its tools, the questions and the rewards of wiki-search."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import tomllib
import unittest
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import episodes_by_hand
import verifiers.v1 as vf
from verifiers.v1.types import AssistantMessage, ToolCall
from wiki_search import WikiSearchConfig, WikiSearchTaskset
from wiki_search.demonstrations import ARGS, FIRST_SEED, MAX_TOKENS, demonstrations
from wiki_search.library import Document, Library, invented, read_pages
from wiki_search.questions import kin_by_kind
from wiki_search.reading import contains, kin_of, says, word_count
from wiki_search.world import World

taskset = partial(episodes_by_hand.taskset, "wiki-search")


def reward(task: vf.Task, reply: str | AssistantMessage, finish: str = "stop") -> float:
    """What a rollout that ends with this reply earns."""
    return episodes_by_hand.scored(task, reply, finish).reward


class Encyclopedia(unittest.TestCase):
    def setUp(self) -> None:
        self.world = World(0, 60, 120)
        self.library = Library(invented(self.world))

    def test_every_answer_stands_on_the_page_that_the_question_leads_to(self) -> None:
        pages = {page.page_id: page for page in self.world.pages}
        questions = list(self.world.questions())
        self.assertEqual(len({one.text for one in questions}), len(questions))
        for question in questions:
            self.assertTrue(contains(pages[question.pages[-1]].text, question.answer), question)
            if len(question.pages) == 2:
                first, second = (pages[one] for one in question.pages)
                self.assertTrue(contains(first.text, second.title), question)
                self.assertTrue(contains(question.text, first.title))
                self.assertFalse(contains(question.text, second.title))

    def test_search_finds_the_page_of_a_question(self) -> None:
        questions = [one for one in self.world.questions() if len(one.pages) == 1]
        first = sum(self.library.search(one.text, 10)[0].page_id == one.pages[0] for one in questions)
        ten = sum(one.pages[0] in [d.page_id for d in self.library.search(one.text, 10)] for one in questions)
        self.assertEqual(ten, len(questions))
        self.assertGreater(first / len(questions), 0.9)
        self.assertEqual(self.library.search("zzzz", 10), [])
        self.assertEqual(len(self.library.search("the town", 3)), 3)

    def test_sections(self) -> None:
        town = self.world.towns[0]
        page_id = town.name.lower()
        sections = self.library.sections(page_id)
        self.assertEqual([name for _, name in sections][1:3], ["History", "Economy"])
        read = self.library.read(f"{page_id}:history")
        self.assertEqual(read, f"# History\n{town.name} was founded in {town.founded} by {town.founder}.")
        self.assertIn("# Culture", self.library.read(f"{page_id}:full"))
        self.assertTrue(all(self.library.read(one).startswith("#") for one, _ in sections))
        for call, why in (
            (lambda: self.library.sections("nowhere"), "search_pages"),
            (lambda: self.library.read(f"{page_id}:nothing"), "view_sections"),
            (lambda: self.library.read("history"), "page_id:section_id"),
        ):
            with self.assertRaisesRegex(LookupError, why):
                call()

    def test_all_that_stands_under_one_heading_can_be_read(self) -> None:
        library = Library([Document("a", "A", "# A\nx\n# Notes\none\n# B\ny\n## Notes\ntwo")])
        self.assertEqual(library.sections("a"), [("a:a", "A"), ("a:notes", "Notes"), ("a:b", "B")])
        self.assertEqual(library.read("a:notes"), "# Notes\none\n## Notes\ntwo")

    def test_ranking_is_bm25(self) -> None:
        library = Library(
            [
                Document("a", "A", "rare common common"),
                Document("b", "B", "common " * 3),
                Document("c", "Rare", "x"),
            ]
        )
        self.assertEqual([d.page_id for d in library.search("rare", 9)], ["c", "a"])
        self.assertEqual([d.page_id for d in library.search("common", 9)], ["b", "a"])
        with self.assertRaisesRegex(ValueError, "two pages"):
            Library([Document("a", "A", ""), Document("a", "B", "")])

    def test_a_search_finds_as_many_as_is_said(self) -> None:
        for count in (1, 10):
            (server,) = WikiSearchTaskset.toolsets(WikiSearchConfig(max_results=count))
            asyncio.run(server.setup())
            self.assertEqual(len(server.search_pages("the town")), count)
        for refused in (0, 101):
            with self.assertRaisesRegex(ValueError, "max_results"):
                taskset(max_results=refused)

    def test_worlds_repeat(self) -> None:
        again, other = World(0, 60, 120), World(1, 60, 120)
        self.assertEqual([p.text for p in again.pages], [p.text for p in self.world.pages])
        self.assertNotEqual([p.text for p in other.pages], [p.text for p in self.world.pages])


class Rewards(unittest.TestCase):
    def test_the_right_answer_earns_one_and_others_nothing(self) -> None:
        for task in taskset(num_train=60):
            right = task.data.answer
            self.assertEqual(reward(task, f"It was **{right}**."), 1.0)
            self.assertEqual(reward(task, f"<think>Hm.</think>The {right.upper()}"), 1.0)
            for wrong in ("", "I do not know.", right[:-1], f"{right}x", f"<think>{right}", f"{right} " * 60):
                self.assertEqual(reward(task, wrong), 0.0, wrong)
            self.assertEqual(reward(task, right, "length"), 0.0)
            call = ToolCall(id="1", name="search_pages", arguments="{}")
            self.assertEqual(
                reward(task, AssistantMessage(content=right, tool_calls=[call])),
                0.0,
                "a turn that calls is no answer",
            )

    def test_a_list_of_every_name_earns_nothing_whatever_stands_between_them(self) -> None:
        names = [town.name for town in World(0, 60, 120).towns]
        (task, *_) = [task for task in taskset() if task.data.answer in names]
        for between in (" ", ",", "/", "\u2014"):
            self.assertEqual(reward(task, between.join(names)), 0.0, between)
            self.assertEqual(reward(task, between.join([task.data.answer, *names[:9]])), 0.0, between)

    def test_lists_that_fit_into_the_words_earn_no_more_than_a_guess(self) -> None:
        """__init__.py 2: one list for all questions, and one for each kind, each of the likeliest answers."""
        tasks = list(taskset())
        every = Counter(task.data.answer for task in tasks)
        kinds = {task.data.kind for task in tasks}
        self.assertEqual(kinds, {"year", "person", "season", "town", "river", "fair"})
        by_kind = {
            kind: Counter(task.data.answer for task in tasks if task.data.kind == kind) for kind in kinds
        }
        for listed in (dict.fromkeys(kinds, every), by_kind):
            said = {kind: likeliest(counts, 50) for kind, counts in listed.items()}
            earned = sum(reward(task, said[task.data.kind]) for task in tasks) / len(tasks)
            self.assertLess(earned, 0.05, said)
        (season, *_) = [task for task in tasks if task.data.kind == "season"]
        self.assertEqual(reward(season, "spring summer autumn winter"), 0.0)
        # Verifiers' own server makes a task anew from its data.
        again = type(season)(type(season.data).model_validate(season.data.model_dump()))
        self.assertEqual(reward(again, "spring summer autumn winter"), 0.0)
        self.assertEqual(reward(again, season.data.answer), 1.0)

    def test_right_answers_in_whole_sentences_earn_one(self) -> None:
        """The question's words again, and the sentence of the encyclopedia that has the answer."""
        world = World(0, 60, 120)
        sentences = {page.page_id: [body for _, body in page.sections] for page in world.pages}
        pages = {question.text: question.pages for question in world.questions()}
        for task in taskset():
            asked, right = task.data.prompt, task.data.answer
            found = [one for one in sentences[pages[asked][-1]] if contains(one, right)]
            told = found[0] if task.data.kind != "person" else found[-1]
            for reply in (
                f"{asked} It is {right}.",
                f"You asked: {asked.lower()} The answer, as far as I see, is **{right}**.",
                told,
                f"{asked} {told}",
            ):
                self.assertEqual(reward(task, reply), 1.0, reply)

    def test_another_of_its_kind_and_a_denial_are_no_answer(self) -> None:
        kin = kin_of(["Gathford", "Bruni Stalmo", "York", "New York", "The Hague"])
        asked = "In which town was Bruni Stalmo born?"
        for text, answer, right in (
            ("Bruni Stalmo was born in Gathford.", "Gathford", True),
            ("Gathford or York", "Gathford", False),
            ("New York", "York", False),
            ("New York", "New York", True),
            ("the Hague", "The Hague", True),
            ("It is not Gathford.", "Gathford", False),
            ("It cannot be Gathford.", "Gathford", False),
            ("Neither Gathford", "Gathford", False),
            ("She wasn\u2019t born there. Not in the town of Gathford!", "Gathford", False),
            ("It isn't Gathford, it's Gathford.", "Gathford", True),
            ("It is Gathford, not far from the sea.", "Gathford", True),
            ("Gath ford", "Gathford", False),
            ("", "", False),
        ):
            self.assertEqual(says(text, answer, asked, kin), right, text)
        self.assertTrue(says("Gathford or York", "Gathford", asked, frozenset()), "no kin, no rivals")

    def test_contains(self) -> None:
        self.assertTrue(contains("the Bram Fair, of course", "Bram Fair"))
        self.assertFalse(contains("Fair Bram", "Bram Fair"))
        self.assertFalse(contains("in 11907", "1907"))


def likeliest(counts: Counter[str], words: int) -> str:
    """So many words of answers, those first that earn most for a word."""
    listed: list[str] = []
    for answer, _ in sorted(counts.items(), key=lambda one: -one[1] / word_count(one[0])):
        if word_count(" ".join([*listed, answer])) <= words:
            listed.append(answer)
    return ", ".join(listed)


class Data(unittest.TestCase):
    def test_splits(self) -> None:
        train = [task.data.prompt for task in taskset(num_train=300)]
        held_out = [task.data.prompt for task in taskset(split="eval")]
        self.assertEqual((len(train), len(held_out)), (300, 100))
        self.assertFalse(set(train) & set(held_out))
        self.assertEqual(train, [task.data.prompt for task in taskset(num_train=300)])

    def test_files(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            corpus, questions = Path(folder, "pages.jsonl"), Path(folder, "questions.jsonl")
            rows = [
                {"id": "x:1", "title": "X", "content": "no headings"},
                {"title": "Two Words", "content": "# A\nb"},
                {"title": "Lines", "content": "a\u2028b"},
            ]
            corpus.write_text(
                "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
            )
            asked = [
                {"question": f"{i}\u2028?", "answer": i, "kind": "x" if i > 2 else None} for i in range(5)
            ]
            questions.write_text(
                "\n".join(json.dumps(one, ensure_ascii=False) for one in asked), encoding="utf-8"
            )
            loaded = taskset(corpus=corpus, questions=questions, num_eval=2)
            self.assertEqual([task.data.prompt for task in loaded], ["2\u2028?", "3\u2028?", "4\u2028?"])
            two, three, _ = loaded
            self.assertEqual(reward(three, "3 or 4"), 0.0)
            self.assertEqual((reward(three, "3, not 2"), reward(two, "2 or 3")), (1.0, 1.0))
            self.assertEqual(kin_by_kind(two.data.source), {"": kin_of(()), "x": kin_of("34")})
            library = Library(read_pages(corpus))
            self.assertEqual(library.sections("x_1"), [("x_1:full", "Full Page")])
            self.assertEqual(library.read("two_words:a"), "# A\nb")
            with self.assertRaisesRegex(ValueError, "none are left"):
                list(taskset(corpus=corpus, questions=questions))
            with questions.open("a", encoding="utf-8") as more:
                more.write("\n" + json.dumps(asked[1]))
            loaded = taskset(corpus=corpus, questions=questions, num_eval=2)
            self.assertEqual([task.data.answer for task in loaded], ["2", "3", "4"], "share none")
            with self.assertRaisesRegex(ValueError, "belong together"):
                taskset(corpus=corpus)
            for line, why in (("{title", "it is no JSON"), ("7", "it is no object")):
                broken = Path(folder, "broken.jsonl")
                broken.write_text(f"\n{line}\n")
                with self.assertRaisesRegex(ValueError, f"broken.jsonl, line 2: {why}"):
                    read_pages(broken)
                with self.assertRaisesRegex(ValueError, f"broken.jsonl, line 2: {why}"):
                    list(taskset(corpus=corpus, questions=broken, num_eval=0))
            broken.write_text('{"title": 1984, "content": "a", "question": "b", "answer": null}')
            with self.assertRaisesRegex(ValueError, r"line 1: a page needs a title and a content, both text"):
                read_pages(broken)
            with self.assertRaisesRegex(ValueError, r"line 1: needs a question and an answer"):
                list(taskset(corpus=corpus, questions=broken, num_eval=0))


class Demonstrations(unittest.TestCase):
    def test_what_is_looked_up_is_what_the_tools_say_and_earns_everything(self) -> None:
        world = World(FIRST_SEED + random.Random(5).randrange(1 << 30), int(str(ARGS["towns"])), 0)
        library = Library(invented(world))
        asked = {question.text: question for question in world.questions()}
        for said in islice(demonstrations(5, 0.0), 200):
            question = asked[str(said[1]["content"])]
            self.assertEqual(said[-1], {"role": "assistant", "content": question.answer})
            for call, result in zip(said[2:-1:2], said[3::2], strict=True):
                function = call["tool_calls"][0]["function"]  # type: ignore[index]
                arguments = function["arguments"]
                if function["name"] == "search_pages":
                    (page,) = library.search(arguments["query"], 1)
                    self.assertEqual(page.page_id, question.pages[0])
                    shown = json.dumps({"page_id": page.page_id, "title": page.title}, indent=2)
                else:
                    shown = library.read(arguments["section_id"])
                self.assertEqual(result["content"], shown)
            self.assertLessEqual(len(said[2:]), 2 * int(str(ARGS["max_turns"])) - 1)
            self.assertIn(question.answer, str(said[-2]["content"]))

    def test_a_habit_looks_nothing_up_and_is_seldom_right(self) -> None:
        right = Counter[bool]()
        world = World(FIRST_SEED + random.Random(6).randrange(1 << 30), int(str(ARGS["towns"])), 0)
        asked = {question.text: question.answer for question in world.questions()}
        for said in islice(demonstrations(6, 1.0), 500):
            self.assertEqual(len(said), 3)
            right[asked[str(said[1]["content"])] == said[2]["content"]] += 1
        self.assertLess(right[True] / right.total(), 0.15)

    def test_the_configuration_trains_what_is_demonstrated(self) -> None:
        config = tomllib.loads(Path(__file__).parents[3].joinpath("configs/wiki-search.toml").read_text())
        self.assertEqual(config["env"], [{"id": "wiki-search", "args": ARGS}])
        self.assertEqual(config["sampling"]["max_tokens"], MAX_TOKENS)
