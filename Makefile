# Ferroce: every target does its own set-up; `make help` lists them.
CARGO ?= cargo
CC ?= gcc
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
UNITDIR ?= $(PREFIX)/lib/systemd/system
DESTDIR ?=
FUZZ_SECONDS ?= 60

TARGET := $(or $(CARGO_TARGET_DIR),target)
BIN := $(TARGET)/release
LIB := $(BIN)/lib
# The suffixes that libibverbs appends to a driver's name, one file for each (provider/src/abi).
SUFFIXES := 34 57 59 64 65
MULTIARCH = $(or $(shell $(CC) -print-multiarch 2>/dev/null),.)
DRIVERDIR = $(PREFIX)/lib/$(MULTIARCH)/libibverbs

.PHONY: help build demo test test-full interop bench fuzz deny install uninstall clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

build: ## build the commands, the provider files and the shim (release) into target/release
	@tests/setup build
	$(CARGO) build --release --workspace --bins --lib
	@mkdir -p $(LIB)
	@for s in $(SUFFIXES); do \
		tests/place $(BIN)/libferroce_provider.so $(LIB)/libferroce-rdmav$$s.so || exit 1; done
	@tests/place $(BIN)/libferroce_shim.so $(LIB)/libferroce_shim.so

demo: build ## the main job: ibv_rc_pingpong between two processes over loopback
	@tests/setup demo
	@tests/demo $(BIN)

test: build ## all tests that need no virtual machine
	@tests/setup test
	@tests/run $(BIN)

test-full: build ## the same with all real programs everywhere and longer simulations: an hour
	@tests/setup test test-full
	@FULL=1 FERROCE_SEEDS=$${FERROCE_SEEDS:-10000} tests/run $(BIN)

interop: build ## against Linux Soft-RoCE, in a guest (root, or access to /dev/net/tun)
	@tests/setup interop
	@tests/interop/run $(BIN)

bench: build ## speed, as ratios to plain UDP, TCP and AF_XDP on the same path
	@tests/setup bench
	@tests/bench/run $(BIN)

fuzz: ## each fuzz target for FUZZ_SECONDS (60)
	@tests/setup fuzz
	@fuzz/run $(FUZZ_SECONDS)

deny: ## licences, advisories and sources of the dependencies
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny check

install: build ## DESTDIR, PREFIX (/usr/local), SYSCONFDIR (/etc): what a distribution would package
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/sbin $(DESTDIR)$(PREFIX)/lib/ferroce \
		$(DESTDIR)$(DRIVERDIR) $(DESTDIR)$(SYSCONFDIR)/libibverbs.d $(DESTDIR)$(UNITDIR) \
		$(DESTDIR)$(PREFIX)/share/man/man8
	install -s -m 755 $(BIN)/ferroce $(DESTDIR)$(PREFIX)/bin/
	install -s -m 755 $(BIN)/ferroced $(DESTDIR)$(PREFIX)/sbin/
	install -s -m 644 $(LIB)/libferroce_shim.so $(DESTDIR)$(PREFIX)/lib/ferroce/
	for s in $(SUFFIXES); do \
		install -s -m 644 $(LIB)/libferroce-rdmav$$s.so $(DESTDIR)$(DRIVERDIR)/ || exit 1; done
	sed 's|@DRIVERDIR@|$(DRIVERDIR)|' dist/ferroce.driver >$(DESTDIR)$(SYSCONFDIR)/libibverbs.d/ferroce.driver
	sed 's|@PREFIX@|$(PREFIX)|' dist/ferroced.service >$(DESTDIR)$(UNITDIR)/ferroced.service
	install -m 644 man/*.8 $(DESTDIR)$(PREFIX)/share/man/man8/

uninstall: ## remove what install put there
	rm -f $(DESTDIR)$(PREFIX)/bin/ferroce $(DESTDIR)$(PREFIX)/sbin/ferroced \
		$(DESTDIR)$(DRIVERDIR)/libferroce-rdmav*.so $(DESTDIR)$(SYSCONFDIR)/libibverbs.d/ferroce.driver \
		$(DESTDIR)$(UNITDIR)/ferroced.service $(patsubst man/%,$(DESTDIR)$(PREFIX)/share/man/man8/%,$(wildcard man/*.8))
	rm -rf $(DESTDIR)$(PREFIX)/lib/ferroce

clean: ## remove all that was built
	$(CARGO) clean
	rm -rf fuzz/target fuzz/artifacts
