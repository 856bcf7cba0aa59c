"""Train, test, compare: `python run.py --help`."""

if __name__ == "__main__":
    # imported here, because each process that tokenises imports this file too: torch would cost it 400 MB
    from kerple.cli.main import main

    main()
